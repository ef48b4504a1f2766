"""The Chinese lexicon. All phrases were written for this package; none describes a real patient."""

from accumft.synthetic.lexicon import Department, Language, phrases, tests

_DEPARTMENTS = (
    Department(
        label="心内科",
        share=0.16,
        symptoms=phrases("""
            胸骨后压榨样疼痛; 心悸; 活动后胸闷; 夜间阵发性呼吸困难; 双下肢凹陷性水肿; 心前区疼痛; 心慌; 胸痛放射至左肩;
            不能平卧; 活动时晕厥; 心跳漏搏感; 上楼时胸口发紧; 心跳快而不齐; 劳累后心前区闷痛"""),
        signs=phrases("""
            心律绝对不齐; 颈静脉怒张; 心尖部收缩期杂音; 心界向左扩大; 心包摩擦音; 舒张期奔马律; 胸前导联ST段抬高;
            完全性左束支传导阻滞; 频发室性早搏; 主动脉瓣区喷射样杂音"""),
        diseases=phrases("""
            急性心肌梗死; 不稳定型心绞痛; 心房颤动; 充血性心力衰竭; 主动脉瓣狭窄; 二尖瓣关闭不全; 急性心包炎;
            病毒性心肌炎; 阵发性室上性心动过速; 扩张型心肌病; 冠心病; 三度房室传导阻滞; 感染性心内膜炎; 病态窦房结综合征"""),
        drugs=phrases("""
            比索洛尔; 胺碘酮; 硝酸甘油; 替格瑞洛; 地高辛; 伊伐布雷定; 氯吡格雷; 沙库巴曲缬沙坦; 冠脉支架; 永久起搏器;
            射频消融术; 单硝酸异山梨酯"""),
        tests=tests("""
            肌钙蛋白I | ng/L | 2-14 | 90-4200
            NT-proBNP | pg/mL | 20-110 | 1400-9800
            左室射血分数 | % | 56-66 | 18-38
            CK-MB | ng/mL | 0.8-4.1 | 14.0-88.0
            QTc间期 | ms | 390-430 | 505-580"""),
    ),
    Department(
        label="呼吸内科",
        share=0.14,
        symptoms=phrases("""
            咳嗽咳黄痰; 喘息; 痰中带血; 咯血; 刺激性干咳; 铁锈色痰; 深吸气时胸膜样疼痛; 夜间咳喘; 反复气喘; 咳大量脓痰;
            遇冷空气后咳嗽; 打鼾伴呼吸暂停; 痰多黏稠不易咳出; 咽痒阵咳"""),
        signs=phrases("""
            双肺满布哮鸣音; 右下肺湿啰音; 管状呼吸音; 胸膜摩擦音; 左下肺叩诊浊音; 右肺呼吸音减低; 桶状胸; 肋膈角变钝;
            胸片示右下肺实变; CT示双肺磨玻璃影"""),
        diseases=phrases("""
            社区获得性肺炎; 支气管哮喘; 慢性阻塞性肺疾病急性加重; 支气管扩张; 自发性气胸; 胸腔积液; 肺间质纤维化;
            急性支气管炎; 肺气肿; 睡眠呼吸暂停综合征; 肺脓肿; 肺结核; 吸入性肺炎; 小细胞肺癌"""),
        drugs=phrases("""
            沙丁胺醇气雾剂; 噻托溴铵; 布地奈德福莫特罗; 异丙托溴铵雾化; 孟鲁司特; 夜间无创通气; 胸腔闭式引流; 家庭氧疗; 茶碱缓释片;
            氨溴索; 乙酰半胱氨酸; 羧甲司坦"""),
        tests=tests("""
            呼气峰流速 | L/min | 430-590 | 140-260
            FEV1占预计值 | % | 86-104 | 31-56
            FEV1/FVC | % | 76-86 | 41-62
            呼出气一氧化氮 | ppb | 8-20 | 52-110
            弥散功能占预计值 | % | 82-100 | 30-52"""),
    ),
    Department(
        label="消化内科",
        share=0.14,
        symptoms=phrases("""
            餐后烧心; 黑便; 黏液脓血便; 进食后呕吐; 上腹部烧灼痛; 腹胀嗳气; 便秘; 吞咽梗阻感; 进油腻食物后右上腹绞痛; 水样腹泻;
            呕血; 反酸; 饥饿时上腹隐痛; 里急后重"""),
        signs=phrases("""
            剑突下压痛; 墨菲征阳性; 移动性浊音阳性; 巩膜黄染; 蜘蛛痣; 肝肋下可触及; 右下腹反跳痛; 肠鸣音亢进; 胃镜见十二指肠球部溃疡;
            食管静脉曲张"""),
        diseases=phrases("""
            消化性溃疡; 胃食管反流病; 溃疡性结肠炎; 克罗恩病; 急性胰腺炎; 肝硬化; 急性胆囊炎; 肠易激综合征; 胆囊结石; 上消化道出血;
            幽门螺杆菌胃炎; 急性阑尾炎; 结肠息肉; 病毒性肝炎"""),
        drugs=phrases("""
            奥美拉唑; 泮托拉唑; 美沙拉嗪; 乳果糖; 熊去氧胆酸; 蒙脱石散; 多潘立酮; 铝碳酸镁; 莫沙必利; 结肠镜下息肉切除; 胰酶肠溶胶囊;
            四联抗幽门螺杆菌治疗"""),
        tests=tests("""
            脂肪酶 | U/L | 15-55 | 480-2900
            淀粉酶 | U/L | 30-95 | 420-1900
            谷丙转氨酶 | U/L | 10-35 | 210-1450
            总胆红素 | umol/L | 5-17 | 58-240
            粪便钙卫蛋白 | ug/g | 5-45 | 420-1800"""),
    ),
    Department(
        label="神经内科",
        share=0.14,
        symptoms=phrases("""
            一侧搏动性头痛伴闪光; 右侧肢体无力; 言语不清; 口角歪斜; 偏身麻木; 四肢抽搐伴意识丧失; 静止时手抖; 视物成双; 行走不稳;
            记忆力下降; 双足麻木如踩棉花; 突发剧烈头痛; 小碎步; 眼睑下垂朝轻暮重"""),
        signs=phrases("""
            左侧鼻唇沟变浅; 巴宾斯基征阳性; 腱反射亢进; 齿轮样强直; 眼球震颤; 踝反射消失; 同向性偏盲; 运动性失语; 颈项强直;
            右上肢肌力3级"""),
        diseases=phrases("""
            脑梗死; 偏头痛; 癫痫; 帕金森病; 多发性硬化; 短暂性脑缺血发作; 吉兰-巴雷综合征; 重症肌无力; 面神经炎; 三叉神经痛;
            阿尔茨海默病; 蛛网膜下腔出血; 病毒性脑膜炎; 周围神经病"""),
        drugs=phrases("""
            左乙拉西坦; 舒马普坦; 多巴丝肼; 拉莫三嗪; 多奈哌齐; 溴吡斯的明; 丙戊酸钠; 卡马西平; 阿替普酶静脉溶栓; 托吡酯; 普拉克索;
            甲钴胺"""),
        tests=tests("""
            NIHSS评分 | 分 | 0-0 | 6-19
            MMSE评分 | 分 | 28-30 | 12-21
            MoCA评分 | 分 | 27-30 | 11-19
            脑脊液蛋白 | g/L | 0.2-0.4 | 1.1-2.8
            脑脊液压力 | mmH2O | 90-170 | 290-420"""),
    ),
    Department(
        label="肾内科",
        share=0.11,
        symptoms=phrases("""
            泡沫尿; 尿量明显减少; 酱油色尿; 晨起眼睑浮肿; 肉眼血尿; 无尿; 尿频尿痛; 腰痛伴寒战; 腰部绞痛向会阴放射; 夜尿增多;
            尿色浑浊; 咽痛后茶色尿; 尿中排出砂石; 肾区酸胀"""),
        signs=phrases("""
            肾区叩击痛; 尿沉渣见红细胞管型; 尿蛋白4+; 超声示肾盂积水; 双肾缩小回声增强; 双肾多发囊肿; 动静脉内瘘震颤; 输尿管末端结石;
            白细胞管型; 尿异形红细胞"""),
        diseases=phrases("""
            急性肾损伤; 慢性肾脏病; 肾病综合征; IgA肾病; 急性肾盂肾炎; 肾结石; 急性肾小球肾炎; 多囊肾; 尿毒症; 膜性肾病; 狼疮性肾炎;
            肾动脉狭窄; 间质性肾炎; 微小病变肾病"""),
        drugs=phrases("""
            血液透析; 腹膜透析; 司维拉姆; 促红细胞生成素; 肾移植; 碳酸氢钠片; 托伐普坦; 体外冲击波碎石; 复方α-酮酸; 输尿管支架;
            碳酸钙; 尿毒清颗粒"""),
        tests=tests("""
            血肌酐 | umol/L | 58-96 | 240-890
            肾小球滤过率 | mL/min | 91-118 | 8-34
            尿素氮 | mmol/L | 3.1-7.0 | 19.0-44.0
            尿白蛋白肌酐比 | mg/mmol | 0-2 | 85-620
            血钾 | mmol/L | 3.7-4.8 | 6.1-7.2"""),
    ),
    Department(
        label="内分泌科",
        share=0.12,
        symptoms=phrases("""
            口干多饮; 怕热多汗伴消瘦; 颈前肿大; 怕冷伴体重增加; 每日饮水数升; 心慌手抖进食糖后缓解; 手足变大; 泌乳; 血糖升高;
            皮肤紫纹; 突眼; 反复低血糖; 皮肤皱褶处变黑; 向心性肥胖"""),
        signs=phrases("""
            甲状腺弥漫性肿大; 甲状腺血管杂音; 满月脸; 水牛背; 黑棘皮; 呼气烂苹果味; 甲状腺质硬结节; 腹部宽大紫纹; 眼裂增宽;
            肾上腺占位"""),
        diseases=phrases("""
            2型糖尿病; 1型糖尿病; 糖尿病酮症酸中毒; 甲状腺功能亢进症; 甲状腺功能减退症; 桥本甲状腺炎; 库欣综合征; 艾迪生病; 肢端肥大症;
            泌乳素瘤; 嗜铬细胞瘤; 原发性甲状旁腺功能亢进; 尿崩症; 原发性醛固酮增多症"""),
        drugs=phrases("""
            二甲双胍; 甘精胰岛素; 左甲状腺素; 甲巯咪唑; 恩格列净; 格列齐特; 氢化可的松替代; 溴隐亭; 司美格鲁肽; 胰岛素泵; 放射性碘;
            去氨加压素"""),
        tests=tests("""
            糖化血红蛋白 | % | 4.9-5.6 | 8.6-13.2
            空腹血糖 | mmol/L | 4.2-5.5 | 11.8-26.0
            TSH | mIU/L | 0.6-3.6 | 18.0-92.0
            游离T4 | pmol/L | 11-20 | 36-88
            晨皮质醇 | nmol/L | 280-520 | 20-85"""),
    ),
    Department(
        label="骨科",
        share=0.11,
        symptoms=phrases("""
            下楼时膝关节疼痛; 踝关节扭伤; 腰痛放射至臀部; 肩部上举疼痛; 运动后膝关节肿胀; 摔倒后腕部疼痛; 髋部僵硬; 膝关节交锁;
            晨起第一步足跟痛; 肩关节弹响; 握物时肘外侧疼痛; 跌倒后不能负重; 手指弹响卡顿; 弯腰搬物后腰痛"""),
        signs=phrases("""
            膝关节间隙压痛; 前抽屉试验阳性; 麦氏征阳性; 肩关节疼痛弧; 下肢短缩外旋畸形; 髌骨摩擦感; 鼻烟窝压痛; 外踝肿胀;
            直腿抬高试验阳性; X线见骨折线"""),
        diseases=phrases("""
            膝骨关节炎; 桡骨远端骨折; 股骨颈骨折; 肩袖撕裂; 半月板损伤; 前交叉韧带断裂; 腰椎间盘突出症; 踝关节韧带损伤; 肩周炎; 网球肘;
            跟腱断裂; 足底筋膜炎; 腰椎压缩性骨折; 肩关节脱位"""),
        drugs=phrases("""
            石膏固定; 全膝关节置换; 膝关节支具; 关节镜修补术; 关节腔注射; 切开复位内固定; 前臂吊带; 拄拐; 腰围固定; 手法复位; 腕部夹板;
            股四头肌锻炼"""),
        tests=tests("""
            膝关节屈曲度 | 度 | 130-142 | 60-95
            肩外展 | 度 | 165-178 | 40-80
            Cobb角 | 度 | 0-6 | 28-52
            髋屈曲度 | 度 | 112-125 | 50-78
            握力 | kg | 34-48 | 7-15"""),
    ),
    Department(
        label="皮肤科",
        share=0.08,
        symptoms=phrases("""
            皮疹瘙痒; 肘部鳞屑斑; 黑痣增大; 全身风团; 皮肤水疱; 手部干裂; 面部痘痘; 环形红斑瘙痒; 斑片状脱发; 头皮屑多; 指缝夜间剧痒;
            带状疱疹样疼痛水疱; 趾甲增厚变脆; 手背白斑"""),
        signs=phrases("""
            膝部银白色鳞屑性斑块; 红色斑丘疹; 簇集性水疱; 指缝隧道; 色素斑边缘不规则; 苔藓样变; 粉刺; 蜜黄色痂; 甲凹点;
            皮肤划痕征阳性"""),
        diseases=phrases("""
            银屑病; 特应性皮炎; 接触性皮炎; 寻常痤疮; 黑色素瘤; 基底细胞癌; 疥疮; 带状疱疹; 玫瑰痤疮; 慢性荨麻疹; 体癣; 脓疱疮; 白癜风;
            斑秃"""),
        drugs=phrases("""
            丙酸氯倍他索软膏; 润肤剂; 异维A酸; 硫磺软膏; 过氧苯甲酰凝胶; 窄谱中波紫外线; 他克莫司软膏; 特比萘芬乳膏; 卡泊三醇; 炉甘石洗剂;
            酮康唑洗剂; 皮损冷冻"""),
        tests=tests("""
            PASI评分 | 分 | 0-1 | 12-34
            DLQI评分 | 分 | 0-1 | 13-27
            皮损面积 | % | 0-0 | 15-60
            EASI评分 | 分 | 0-1 | 18-48
            皮损直径 | mm | 1-4 | 9-26"""),
    ),
)

_STATEMENTS = {
    "symptom.active": phrases("""
        因{x}{duration}来诊。; 主诉{x}{duration}。; {duration}前出现{x}。; 本次因{x}就诊。; 今日来诊，诉{x}。; 现有{x}，较前加重。;
        近{duration}来{x}，前来就诊。; 目前主要不适为{x}。; 新发{x}{duration}。"""),
    "symptom.denied": phrases("""
        否认{x}。; 无{x}。; 未见{x}。; 没有{x}。; 不伴{x}。; 从无{x}。; 病程中无{x}。"""),
    "symptom.past": phrases("""
        {year}年曾有{x}，已完全缓解。; 多年前有过{x}，此后未再发。; 既往{x}，早已消失。; {year}年一度{x}，自行好转。"""),
    "symptom.family": phrases("""
        {relative}有{x}。; {relative}因{x}在外院就诊。; 家中{relative}近来{x}。"""),
    "sign.active": phrases("""
        查体：{x}。; 今日查体见{x}。; 体检发现{x}。; 目前可见{x}。; 检查示{x}。; 现有{x}。"""),
    "sign.denied": phrases("""
        未见{x}。; 无{x}。; 未发现{x}。; {x}未引出。; 查体无{x}。"""),
    "sign.past": phrases("""
        {year}年曾见{x}，本次已消失。; 旧病历记有{x}，现无。"""),
    "result.active": phrases("""
        今日{x}。; 本次化验：{x}。; 检查回报{x}。; 现测{x}。; 结果异常：{x}。"""),
    "result.denied": phrases("""
        {x}。; 复查{x}。; 未见异常：{x}。; 另测{x}。"""),
    "disease.active": phrases("""
        初步诊断：{x}。; 考虑{x}。; 本次诊断为{x}。; 符合{x}。; 目前诊断{x}。; 按{x}收治。; 今确诊{x}。; 诊断：{x}。"""),
    "disease.denied": phrases("""
        排除{x}。; 不支持{x}。; 已除外{x}。; 不考虑{x}。; 无{x}证据。; 曾怀疑{x}，后否定。; 并非{x}。"""),
    "disease.past": phrases("""
        既往{x}病史（{year}年），现稳定。; {year}年患{x}。; {year}年曾因{x}治疗，此后平稳。; 陈旧性{x}，多年未发。; 早年有{x}，外院随访，无变化。"""),
    "disease.family": phrases("""
        {relative}患{x}。; {relative}有{x}史。; 家族史：{relative}{x}。; {relative}死于{x}。"""),
    "drug.active": phrases("""
        今起予{x}。; 处理：{x}。; 建议{x}。; 现给予{x}。; 拟行{x}。; 本次加用{x}。"""),
    "drug.past": phrases("""
        曾用{x}，{year}年停。; {year}年接受过{x}，已结束。; 早年用过{x}。; {x}早已停用。"""),
    "drug.family": phrases("""
        {relative}在用{x}。; {relative}接受过{x}。"""),
    "drug.denied": phrases("""
        未用{x}。; 无需{x}。; 从未用过{x}。; 无{x}指征。"""),
}

_TERSE = {
    "symptom.active": phrases("{x}。; {x}{duration}。; {x}，{duration}。"),
    "sign.active": phrases("{x}。; 可见{x}。; {x}（+）。"),
    "result.active": phrases("{x}。; 现{x}。"),
    "disease.active": phrases("{x}。; 1.{x}。; {x}，新诊断。"),
    "drug.active": phrases("{x}。; 开始{x}。; 予{x}。"),
    "symptom.denied": phrases("无{x}。; {x}（-）。; 否认{x}。"),
    "sign.denied": phrases("无{x}。; {x}（-）。"),
    "disease.past": phrases("{x}。; {x}（{year}年）。; {year}年{x}。"),
    "symptom.past": phrases("{year}年{x}。"),
    "disease.family": phrases("{relative}：{x}。; {x}（{relative}）。"),
    "symptom.family": phrases("{relative}：{x}。; {x}（{relative}）。"),
    "drug.past": phrases("{x}（{year}年停）。; {x}，已停。"),
    "drug.family": phrases("{relative}用{x}。"),
}

_NEUTRAL = {
    "vitals": phrases("""
        T 36.{digit}℃，P {pulse}次/分，R {breaths}次/分，BP {systolic}/{diastolic}mmHg。; 体重{weight}kg，身高{height}cm。;
        血压{systolic}/{diastolic}mmHg，脉搏{pulse}次/分。; 生命体征平稳，体温36.{digit}℃。; 血氧饱和度{oxygen}%。"""),
    "social": phrases("""
        职业{job}。; 与{household}同住。; {smoking}。; 偶饮酒。; 生活自理。; 近期搬家。; 每日散步。; 每晚睡眠{few}小时。; 爱好{hobby}。"""),
    "exam": phrases("""
        神志清，精神可。; 一般情况可。; 自动体位，查体合作。; 余查体无特殊。; 由{household}陪同。; 营养中等。"""),
    "medication": phrases("""
        维生素D {vitamin}IU每日。; 对乙酰氨基酚必要时服用。; 无其他长期用药。; {allergy}。; 自服复合维生素。; 使用分药盒。"""),
    "results": phrases("""
        血红蛋白{haemoglobin}g/L，白细胞{cells}.{digit}×10^9/L，血小板{platelets}×10^9/L。; C反应蛋白{digit}mg/L。; 血钠{sodium}mmol/L。;
        血常规大致正常。; 检验单号{record}。"""),
    "plan": phrases("""
        {weeks}周后复诊。; 门诊随访。; 不适随诊。; 告知注意事项。; 患者知情同意。; 病假{days}天。; 已与上级医师讨论。; 化验结果电话告知。"""),
    "hpi": phrases("""
        饮食睡眠可。; 二便如常。; 精神可。; 由外院转来。; 休息后无改善。; 自行来院。; 影响日常生活。; 病史由{household}提供。; 误工{days}天。"""),
}

_HEADINGS = {
    "hpi": phrases("主诉; 现病史; 主诉及现病史; 就诊原因"),
    "ros": phrases("系统回顾; 阴性症状; 伴随症状; 系统询问"),
    "past": phrases("既往史; 过去史; 既往病史; 旧病史"),
    "family": phrases("家族史; 家族情况; 亲属病史"),
    "medication": phrases("用药史; 既往用药; 药物史"),
    "social": phrases("个人史; 社会史; 生活史"),
    "vitals": phrases("生命体征; 体征测量; 测量"),
    "exam": phrases("查体; 体格检查; 体检; 专科检查"),
    "results": phrases("辅助检查; 化验; 检查结果; 检验"),
    "assessment": phrases("诊断; 初步诊断; 印象; 评估"),
    "plan": phrases("处理; 治疗计划; 处置; 诊疗计划"),
}

CHINESE = Language(
    departments=_DEPARTMENTS,
    statements=_STATEMENTS,
    terse=_TERSE,
    neutral=_NEUTRAL,
    measurement="{name} {value}{unit}",
    openings=phrases("""
        患者{sex}，{age}岁。; {sex}，{age}岁。; {surname}某，{sex}，{age}岁。; {age}岁{sex}患者。; {sex}/{age}岁，病历号{record}。;
        患者{surname}某某，{age}岁。"""),
    headings=_HEADINGS,
    heading_styles=("{h}：", "{h}:\n", "【{h}】", "{h}\n", "[{h}] ", "■{h} "),
    fillers={
        "sex": ("男", "女"),
        "surname": tuple("王李张刘陈杨赵黄周吴徐孙"),
        "duration": phrases("{few}天; {few}周; {few}个月; {few}日; {few}小时; 半月; 半年; 数日; 一周; 十余天"),
        "relative": phrases("母亲; 父亲; 姐姐; 哥哥; 妹妹; 弟弟; 姑姑; 叔叔; 祖母; 祖父; 外公; 外婆; 舅舅; 姨妈; 堂兄"),
        "smoking": phrases("不吸烟; 从不吸烟; 已戒烟{few}年"),
        "allergy": phrases("无药物过敏史; 青霉素过敏; 否认药物过敏; 乳胶过敏"),
        "hobby": phrases("下棋; 合唱; 养花; 骑车; 书法; 钓鱼"),
        "household": phrases("家属; 配偶; 子女; 父母; 朋友; 护工"),
        "job": phrases("教师; 司机; 工人; 农民; 厨师; 会计; 职员; 学生; 电工; 个体户"),
    },
    numbers={
        "few": (2, 9),
        "digit": (1, 9),
        "systolic": (108, 138),
        "diastolic": (62, 86),
        "pulse": (60, 92),
        "breaths": (12, 18),
        "oxygen": (96, 99),
        "weight": (46, 92),
        "height": (150, 186),
        "vitamin": (400, 1000),
        "haemoglobin": (122, 158),
        "cells": (4, 9),
        "platelets": (160, 380),
        "sodium": (136, 144),
        "weeks": (2, 12),
        "days": (2, 14),
        "record": (100000, 999999),
    },
    flags={
        "high": phrases("{x}↑; {x}（偏高）; {x}，升高; {x}，高于参考值; {x}（异常）"),
        "low": phrases("{x}↓; {x}（偏低）; {x}，降低; {x}，低于参考值; {x}（异常）"),
        "normal": phrases("{x}（正常）; {x}，正常; {x}，在参考范围; {x}（-）; {x}，未见异常"),
    },
    extra_share=0.5,
    list_and=("、", "，", "及", "伴"),
    list_or=("、", "及", "或"),
    list_comma="、",
    sentence_space="",
)
